variable "project" {
  description = "The project that the bucket and its service accounts belong to."
  type        = string
}

variable "bucket" {
  description = "Name of the bucket to make."
  type        = string
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
    condition     = !startswith(var.prefix, "/") && !endswith(var.prefix, "/") && can(regex("^[^'$\\\\]*$", var.prefix))
    error_message = "The prefix must neither begin nor end with a slash, nor hold a quote, a backslash or a $, which a condition or a policy would not take as written."
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
    GKE in `project`), and principals of a workload identity pool (GitHub's jobs, say) or others, as IAM writes them. A
    role that is not named is not made.
  EOT
  type = map(object({
    kubernetes = optional(list(string), [])
    principals = optional(list(string), []) # "principalSet://iam.googleapis.com/projects/1/locations/global/..."
  }))
  default = {}

  validation {
    condition     = alltrue([for role in keys(var.members) : contains(["trainer", "reader", "pruner"], role)])
    error_message = "The roles are trainer, reader and pruner."
  }

  validation {
    condition = alltrue(flatten([
      for role in values(var.members) : [
        for member in role.principals : !contains(["allUsers", "allAuthenticatedUsers"], member) && can(regex("^[^*]+$", member))
      ]
    ]))
    error_message = "Each principal is named, without *: allUsers and allAuthenticatedUsers are everybody, and POOL/* is everybody whom any provider of the pool lets in, GitHub's jobs of strangers among them."
  }

  validation {
    condition = alltrue(flatten([
      for role in values(var.members) : [
        for member in role.kubernetes : can(regex("^[a-z0-9-]+/[a-z0-9.-]+$", member))
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
}

variable "kms_key_name" {
  description = "A Cloud KMS key of your own to encrypt with. Default: Google's, unless `create_kms_key`."
  type        = string
  default     = null
}

variable "create_kms_key" {
  description = "Make a key ring and a key for this bucket. Neither can ever be deleted, only its versions."
  type        = bool
  default     = false
}

variable "log_bucket" {
  description = "A bucket for usage logs. Default: none are kept."
  type        = string
  default     = null
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
