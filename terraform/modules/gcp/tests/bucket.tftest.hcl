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
    members = { for role in ["trainer", "reader", "pruner"] : role => {} }
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
    members          = { for role in ["trainer", "reader", "pruner"] : role => {} }
    prefix           = ""
    versioning       = true
    soft_delete_days = 7
    create_kms_key   = true
    log_bucket       = "acme-logs"
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
    members = { trainer = {} }
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
    members        = { trainer = {} }
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
