# A key of the bucket's own, where it is asked for.

data "google_storage_project_service_account" "this" {
  count = local.own_key ? 1 : 0

  project = var.project
}

resource "google_kms_key_ring" "this" {
  count = var.create_kms_key ? 1 : 0

  project  = var.project
  name     = "${local.name}-${substr(sha256(var.bucket), 0, 8)}"
  location = lower(var.location)
}

resource "google_kms_crypto_key" "this" {
  count = var.create_kms_key ? 1 : 0

  name            = "checkpoints"
  key_ring        = google_kms_key_ring.this[0].id
  rotation_period = "7776000s"
  labels          = var.labels

  lifecycle {
    # Without the key no checkpoint can ever be read again.
    prevent_destroy = true
  }
}

# GCS encrypts on behalf of everyone who reads and writes: they need no right to the key themselves.
resource "google_kms_crypto_key_iam_member" "storage" {
  count = local.own_key ? 1 : 0

  crypto_key_id = local.kms_key
  role          = "roles/cloudkms.cryptoKeyEncrypterDecrypter"
  member        = "serviceAccount:${data.google_storage_project_service_account.this[0].email_address}"
}
