# Who may do what. docs/gcs.md says what each permission is for.

locals {
  permissions = {
    trainer = [
      "storage.multipartUploads.abort",
      "storage.multipartUploads.create",
      "storage.objects.create",
      # Replacing an object is deleting it, by Google's rules: a .metadata, a record, a lease.
      "storage.objects.delete",
      "storage.objects.get",
      "storage.objects.list",
    ]
    reader = [
      "storage.objects.get",
      "storage.objects.list",
    ]
    pruner = [
      "storage.multipartUploads.abort",
      "storage.multipartUploads.list",
      "storage.objects.create",
      "storage.objects.delete",
      "storage.objects.get",
      "storage.objects.list",
    ]
  }

  # Listing is a right to the bucket, not to its objects: a condition on names alone would refuse it.
  condition = join(" || ", [
    "resource.type == 'storage.googleapis.com/Bucket'",
    "resource.name.startsWith('projects/_/buckets/${var.bucket}/objects/${local.below}')",
  ])

  impersonations = merge([
    for role, found in var.members : merge(
      {
        for member in coalesce(found.kubernetes, []) : "${role} ${member}" => {
          role   = role
          member = "serviceAccount:${var.project}.svc.id.goog[${member}]"
        }
      },
      {
        for member in coalesce(found.principals, []) : "${role} ${member}" => { role = role, member = member }
      },
    )
  ]...)
}

resource "google_service_account" "this" {
  for_each = var.members

  project      = var.project
  account_id   = "${local.name}-${each.key}"
  display_name = "bucketpoint ${each.key} of gs://${var.bucket}/${local.below}"
}

resource "google_project_iam_custom_role" "this" {
  for_each = var.members

  project     = var.project
  role_id     = replace("${local.name}_${each.key}", "-", "_")
  title       = "bucketpoint ${each.key}"
  permissions = local.permissions[each.key]
}

resource "google_storage_bucket_iam_member" "this" {
  for_each = var.members

  bucket = google_storage_bucket.this.name
  role   = google_project_iam_custom_role.this[each.key].id
  member = google_service_account.this[each.key].member

  dynamic "condition" {
    for_each = var.prefix == "" ? [] : [local.condition]

    content {
      title      = "below the prefix"
      expression = condition.value
    }
  }
}

resource "google_service_account_iam_member" "this" {
  for_each = local.impersonations

  service_account_id = google_service_account.this[each.value.role].name
  role               = "roles/iam.workloadIdentityUser"
  member             = each.value.member
}
