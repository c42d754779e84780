# Plans against a mocked provider: no account, no network.

mock_provider "google" {}

variables {
  project  = "acme"
  bucket   = "acme-checkpoints"
  location = "europe-west4"
}

run "a_bucket_is_closed_and_frees_what_is_deleted" {
  command = plan

  assert {
    condition     = google_storage_bucket.this.public_access_prevention == "enforced" && google_storage_bucket.this.uniform_bucket_level_access
    error_message = "public access is not prevented"
  }

  assert {
    condition     = google_storage_bucket.this.soft_delete_policy[0].retention_duration_seconds == 0
    error_message = "what retention deletes would be billed for days"
  }
}

run "a_reader_may_only_read" {
  command = plan

  variables {
    members = { reader = { kubernetes = ["train/eval"] } }
  }

  assert {
    condition     = toset(google_project_iam_custom_role.this["reader"].permissions) == toset(["storage.objects.get", "storage.objects.list"])
    error_message = "a reader has other rights"
  }

  assert {
    condition     = google_service_account_iam_member.this["reader train/eval"].member == "serviceAccount:acme.svc.id.goog[train/eval]"
    error_message = "the service account of Kubernetes is another"
  }
}

run "roles_reach_no_object_outside_the_prefix" {
  command = plan

  variables {
    members = { for role in ["trainer", "reader", "pruner"] : role => { principals = [] } }
  }

  assert {
    condition = alltrue([
      for member in values(google_storage_bucket_iam_member.this) :
      strcontains(member.condition[0].expression, "startsWith('projects/_/buckets/acme-checkpoints/objects/runs/')")
    ])
    error_message = "a role reaches other objects"
  }
}

run "an_unknown_role_is_refused" {
  command = plan

  variables {
    members = { admin = {} }
  }

  expect_failures = [var.members]
}

run "a_soft_delete_that_google_does_not_know_is_refused" {
  command = plan

  variables {
    soft_delete_days = 3
  }

  expect_failures = [var.soft_delete_days]
}

run "all_that_is_off_by_default_can_be_had" {
  command = plan

  variables {
    members          = { for role in ["trainer", "reader", "pruner"] : role => { principals = [] } }
    prefix           = ""
    versioning       = true
    soft_delete_days = 7
    create_kms_key   = true
    log_bucket       = { name = "acme-logs" }
    alarm            = {}
  }

  assert {
    condition     = length(google_storage_bucket.this.encryption) == 1 && length(google_monitoring_alert_policy.errors) == 1
    error_message = "no key, or no alarm"
  }

  assert {
    condition     = alltrue([for member in values(google_storage_bucket_iam_member.this) : length(member.condition) == 0])
    error_message = "the roles of a whole bucket are bound to a prefix"
  }
}

run "a_prefix_that_would_end_a_condition_is_refused" {
  command = plan

  variables {
    prefix = "runs') || ('"
  }

  expect_failures = [var.prefix]
}

run "a_policy_to_begin_with_names_the_root" {
  command = plan

  assert {
    condition     = yamldecode(output.retention_yaml).root == "gs://acme-checkpoints/runs/$${RUN_NAME}"
    error_message = "the policy is for another root"
  }
}

run "everybody_is_refused" {
  command = plan

  variables {
    members = { reader = { principals = ["allUsers"] } }
  }

  expect_failures = [var.members]
}

run "everybody_of_a_pool_is_refused" {
  command = plan

  variables {
    members = { trainer = { principals = ["principalSet://iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/*"] } }
  }

  expect_failures = [var.members]
}

run "any_service_account_of_a_cluster_is_refused" {
  command = plan

  variables {
    members = { trainer = { kubernetes = ["train/*"] } }
  }

  expect_failures = [var.members]
}

run "a_prefix_that_a_policy_would_expand_is_refused" {
  command = plan

  variables {
    prefix = "runs/$${HOME}"
  }

  expect_failures = [var.prefix]
}

run "a_bucket_gives_its_name_to_its_service_accounts" {
  command = plan

  variables {
    members = { trainer = { principals = [] } }
  }

  assert {
    condition     = google_service_account.this["trainer"].account_id == "acme-checkpoints-trainer"
    error_message = "a second bucket's service accounts would have the same names"
  }
}

run "a_bucket_whose_name_is_too_long_for_a_service_account_has_one_of_its_own" {
  command = plan

  variables {
    bucket         = "2.checkpoints.of-the-research-cluster-in-europe-west-1.acme.com"
    members        = { trainer = { principals = [] } }
    create_kms_key = true
  }

  assert {
    condition     = can(regex("^ckpt-[0-9a-f]{8}-trainer$", google_service_account.this["trainer"].account_id))
    error_message = "Google takes no such name"
  }

  assert {
    condition     = can(regex("^[a-z0-9-]{1,63}$", google_kms_key_ring.this[0].name))
    error_message = "Cloud KMS takes no such name"
  }
}

run "a_key_and_a_bucket_for_logs_may_be_made_in_the_same_plan" {
  command = plan

  module {
    source = "./tests/made_beside"
  }

  assert {
    condition     = output.bucket == "acme-checkpoints"
    error_message = "the bucket is another"
  }
}

run "principals_are_written_as_iam_writes_them" {
  command = plan

  variables {
    members = {
      trainer = {
        principals = [
          "user:ada@acme.com",
          "group:llm@acme.com",
          "serviceAccount:acme.svc.id.goog[train/trainer]",
          "principal://iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/subject/s",
          "principalSet://iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/attribute.repository/acme/llm",
        ]
      }
    }
  }

  assert {
    condition     = length(google_service_account_iam_member.this) == 5
    error_message = "somebody who is named may not act as the trainer"
  }
}

run "everybody_with_an_address_of_a_domain_is_refused" {
  command = plan

  variables {
    members = { trainer = { principals = ["domain:gmail.com"] } }
  }

  expect_failures = [var.members]
}

run "everybody_with_a_token_for_an_audience_is_refused" {
  command = plan

  variables {
    members = { trainer = { principals = ["principalSet://iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/attribute.aud/x"] } }
  }

  expect_failures = [var.members]
}

run "a_user_written_as_a_pattern_is_refused" {
  command = plan

  variables {
    members = { trainer = { principals = ["user:?@acme.com"] } }
  }

  expect_failures = [var.members]
}

run "a_misspelt_key_of_a_role_is_refused" {
  command = plan

  variables {
    members = { trainer = { kubernete = ["train/trainer"] } }
  }

  expect_failures = [var.members]
}

run "a_name_with_capitals_is_refused_for_a_bucket" {
  command = plan

  variables {
    bucket = "Acme_Bad"
  }

  expect_failures = [var.bucket]
}

run "a_name_that_ends_with_a_dot_is_refused_for_a_bucket" {
  command = plan

  variables {
    bucket = "bad_bucket."
  }

  expect_failures = [var.bucket]
}

run "two_slashes_in_a_prefix_are_refused" {
  command = plan

  variables {
    prefix = "a//b"
  }

  expect_failures = [var.prefix]
}

run "a_prefix_that_leads_out_of_itself_is_refused" {
  command = plan

  variables {
    prefix = "../x"
  }

  expect_failures = [var.prefix]
}

run "a_newline_in_a_prefix_is_refused" {
  command = plan

  variables {
    prefix = "a\nb"
  }

  expect_failures = [var.prefix]
}

run "uploads_that_are_aborted_at_once_are_refused" {
  command = plan

  variables {
    abort_uploads_days = 0
  }

  expect_failures = [var.abort_uploads_days]
}

run "versions_that_are_kept_for_no_day_are_refused" {
  command = plan

  variables {
    noncurrent_days = 0
  }

  expect_failures = [var.noncurrent_days]
}

run "a_key_without_its_ring_is_refused" {
  command = plan

  variables {
    kms_key = { name = "mykey" }
  }

  expect_failures = [var.kms_key]
}

run "a_given_key_beside_a_new_one_is_refused" {
  command = plan

  variables {
    kms_key        = { name = "projects/acme/locations/europe-west4/keyRings/r/cryptoKeys/k" }
    create_kms_key = true
  }

  expect_failures = [google_storage_bucket.this]
}
