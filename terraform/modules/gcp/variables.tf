variable "project" {
  description = "The project that the bucket and its service accounts belong to."
  type        = string
}

variable "bucket" {
  description = "Name of the bucket to make."
  type        = string

  validation {
    # https://cloud.google.com/storage/docs/buckets#naming
    condition     = can(regex("^[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]$", var.bucket)) && alltrue([for part in split(".", var.bucket) : contains(range(1, 64), length(part))])
    error_message = "A bucket's name has 3 to 63 lower-case letters, digits, dashes, underscores and dots, and begins and ends with a letter or digit. With dots it may have 222, and each part between them 1 to 63."
  }
}

variable "location" {
  description = "Region of the bucket: where the accelerators are."
  type        = string
}

variable "prefix" {
  description = "What all runs lie below, without slashes at its ends. The roles reach no object outside it. Empty for the whole bucket."
  type        = string
  default     = "runs"

  validation {
    condition     = var.prefix == "" || alltrue([for part in split("/", var.prefix) : !contains(["", ".", ".."], part)])
    error_message = "The prefix must neither begin nor end with a slash, nor hold two slashes in a row or a part that is . or .."
  }

  validation {
    condition     = can(regex("^[^'$\\\\[:cntrl:]]*$", var.prefix))
    error_message = "The prefix must not hold a quote, a backslash, a $ or a control character such as a newline, which a condition or a policy would not take as written."
  }
}

variable "name" {
  description = "What the names of the service accounts and of their custom roles begin with. Default: the bucket's name if it fits, else ckpt and a hash of it."
  type        = string
  default     = null

  validation {
    # https://cloud.google.com/iam/docs/service-accounts-create: 6 to 30 characters, of which "-trainer" takes 8.
    condition     = var.name == null || can(regex("^[a-z][a-z0-9-]{0,21}$", coalesce(var.name, "-")))
    error_message = "Up to 22 lower-case letters, digits and dashes, a letter first."
  }
}

variable "members" {
  description = <<-EOT
    Who may act as each role's service account: Kubernetes service accounts ("NAMESPACE/NAME", by workload identity of
    GKE in `project`), and principals of a workload identity pool (GitHub's jobs, say) or others, as IAM writes them:
    user:, group:, serviceAccount:, principal:// or principalSet://. A role that is not named is not made. A service
    account that only machines use, and nobody impersonates, is `{ principals = [] }`.
  EOT
  type = map(object({
    kubernetes = optional(list(string))
    principals = optional(list(string)) # "principalSet://iam.googleapis.com/projects/1/locations/global/..."
  }))
  default = {}

  validation {
    condition     = alltrue([for role in keys(var.members) : contains(["trainer", "reader", "pruner"], role)])
    error_message = "The roles are trainer, reader and pruner."
  }

  validation {
    # Terraform drops keys that the type does not have.
    condition     = alltrue([for role in values(var.members) : role.kubernetes != null || role.principals != null])
    error_message = "Each role that is named needs kubernetes or principals. If it has one of them, look for a misspelt key: Terraform drops a key that it does not know. For a service account that nobody impersonates, write principals = []."
  }

  validation {
    condition = alltrue(flatten([
      for role in values(var.members) : [
        for member in coalesce(role.principals, []) : can(regex("^(user:|group:|serviceAccount:|principal(Set)?://iam\\.googleapis\\.com/)[^*?]+$", member)) && !strcontains(member, "/attribute.aud/")
      ]
    ]))
    error_message = "Each principal is a user:, group: or serviceAccount:, or a principal:// or principalSet:// of iam.googleapis.com, without * and ?. Refused are those who are everybody or nearly: allUsers, allAuthenticatedUsers, domain:, POOL/*, and POOL/attribute.aud/..., which every job of the pool's providers fits, those of strangers among them."
  }

  validation {
    condition = alltrue(flatten([
      for role in values(var.members) : [
        for member in coalesce(role.kubernetes, []) : can(regex("^[a-z0-9-]+/[a-z0-9.-]+$", member))
      ]
    ]))
    error_message = "A Kubernetes service account is written NAMESPACE/NAME, without wildcards."
  }
}

variable "versioning" {
  description = "Keep deleted and replaced objects for `noncurrent_days`. They are billed for as long."
  type        = bool
  default     = false
}

variable "noncurrent_days" {
  description = "Days after which deleted and replaced objects of a bucket with versioning are gone for good."
  type        = number
  default     = 3

  validation {
    condition     = var.noncurrent_days >= 1
    error_message = "With 0 days a bucket with versioning would keep nothing: at least 1."
  }
}

variable "soft_delete_days" {
  description = "Days for which deleted objects can be restored, and are billed: 0, or 7 to 90. Google's default of 7 would bill a week of all that retention deletes."
  type        = number
  default     = 0

  validation {
    # https://cloud.google.com/storage/docs/soft-delete
    condition     = var.soft_delete_days == 0 || (var.soft_delete_days >= 7 && var.soft_delete_days <= 90)
    error_message = "0, or 7 to 90 days."
  }
}

variable "abort_uploads_days" {
  description = "Days after which a multipart upload that nobody completed is aborted. Its parts are billed until then."
  type        = number
  default     = 2

  validation {
    condition     = var.abort_uploads_days >= 1
    error_message = "With 0 days the uploads of running saves would be aborted: at least 1."
  }
}

variable "kms_key" {
  description = "A Cloud KMS key of your own to encrypt with. Default: Google's, unless `create_kms_key`. An object, so that the name may be that of a key which the same configuration makes."
  type = object({
    name = string
  })
  default = null

  validation {
    condition     = var.kms_key == null || can(regex("^projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+$", var.kms_key.name))
    error_message = "The name of a key is projects/PROJECT/locations/LOCATION/keyRings/RING/cryptoKeys/KEY, without a version."
  }
}

variable "create_kms_key" {
  description = "Make a key ring and a key for this bucket. Neither can ever be deleted, only its versions."
  type        = bool
  default     = false
}

variable "log_bucket" {
  description = <<-EOT
    A bucket for usage logs. Default: none are kept. In that bucket the group cloud-storage-analytics@google.com needs
    roles/storage.objectCreator, or no logs arrive.
  EOT
  type = object({
    name = string
  })
  default = null
}

variable "alarm" {
  description = "Raise an alarm at more than so many requests per five minutes that GCS failed or throttled."
  type = object({
    errors                = optional(number, 100)
    notification_channels = optional(list(string), [])
  })
  default = null
}

variable "force_destroy" {
  description = "Let `terraform destroy` delete a bucket with checkpoints in it."
  type        = bool
  default     = false
}

variable "labels" {
  description = "Labels of everything that takes them."
  type        = map(string)
  default     = {}
}
