output "bucket" {
  description = "The bucket's name."
  value       = google_storage_bucket.this.name
}

output "root" {
  description = "The URL below which all runs lie."
  value       = trimsuffix("gs://${google_storage_bucket.this.name}/${local.below}", "/")
}

output "service_accounts" {
  description = "E-mail addresses of the roles' service accounts. A Kubernetes service account names its own in the annotation iam.gke.io/gcp-service-account."
  value       = { for role, made in google_service_account.this : role => made.email }
}

output "kms_key_name" {
  description = "The key that objects are encrypted with; null for Google's."
  value       = local.kms_key
}

output "environment" {
  description = "What a job's environment wants: `terraform output -json environment`."
  value = {
    GOOGLE_CLOUD_PROJECT = var.project
    BUCKETPOINT_ROOT     = trimsuffix("gs://${google_storage_bucket.this.name}/${local.below}", "/")
  }
}

output "retention_yaml" {
  description = "A policy for a run below the root: `terraform output -raw retention_yaml > retention.yaml`."
  value = templatefile("${path.module}/../retention.yaml.tftpl", {
    root = trimsuffix("gs://${google_storage_bucket.this.name}/${local.below}", "/")
  })
}
