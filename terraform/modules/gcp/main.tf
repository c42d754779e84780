# A bucket for checkpoints. What retention deletes is gone, and what a dead job left is not billed for ever.

locals {
  # The ID of a service account may have 30 characters, of which "-trainer" takes 8.
  fitting = can(regex("^[a-z][a-z0-9-]{0,21}$", var.bucket)) ? var.bucket : "ckpt-${substr(sha256(var.bucket), 0, 8)}"
  name    = coalesce(var.name, local.fitting)
  below   = var.prefix == "" ? "" : "${var.prefix}/"
  # Known before anything is made, unlike the key itself: how many grants there are depends on it.
  own_key = var.create_kms_key || var.kms_key != null
  kms_key = var.create_kms_key ? google_kms_crypto_key.this[0].id : one(var.kms_key[*].name)
}

resource "google_storage_bucket" "this" {
  # checkov:skip=CKV_GCP_78: versions keep what retention deletes, at full price; the variable versioning switches them on
  # checkov:skip=CKV_GCP_62: usage logs where log_bucket names a bucket for them
  name          = var.bucket
  project       = var.project
  location      = var.location
  force_destroy = var.force_destroy
  labels        = var.labels

  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"

  versioning {
    enabled = var.versioning
  }

  soft_delete_policy {
    retention_duration_seconds = var.soft_delete_days * 86400
  }

  lifecycle_rule {
    condition {
      age = var.abort_uploads_days
    }
    action {
      type = "AbortIncompleteMultipartUpload"
    }
  }

  lifecycle_rule {
    condition {
      days_since_noncurrent_time = var.noncurrent_days
      with_state                 = "ARCHIVED"
    }
    action {
      type = "Delete"
    }
  }

  dynamic "encryption" {
    for_each = local.own_key ? [local.kms_key] : []

    content {
      default_kms_key_name = encryption.value
    }
  }

  dynamic "logging" {
    for_each = var.log_bucket == null ? [] : [var.log_bucket.name]

    content {
      log_bucket = logging.value
    }
  }

  # The bucket is refused a key that its service may not use yet.
  depends_on = [google_kms_crypto_key_iam_member.storage]

  lifecycle {
    # Not a validation: before Terraform 1.9 one variable cannot be compared with another.
    precondition {
      condition     = !var.create_kms_key || var.kms_key == null
      error_message = "kms_key names a key, and create_kms_key asks for a new one: set one of them."
    }
  }
}
