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
