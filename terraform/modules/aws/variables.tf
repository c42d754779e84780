variable "bucket" {
  description = "Name of the bucket to make."
  type        = string
}

variable "prefix" {
  description = "What all runs lie below, without slashes at its ends. The roles reach nothing outside it. Empty for the whole bucket."
  type        = string
  default     = "runs"

  validation {
    condition     = !startswith(var.prefix, "/") && !endswith(var.prefix, "/") && can(regex("^[^*?$\"\\\\]*$", var.prefix))
    error_message = "The prefix must neither begin nor end with a slash, nor hold one of *?$, which IAM expands, a quote or a backslash."
  }
}

variable "name" {
  description = "What the names of the roles begin with. Default: the bucket's name."
  type        = string
  default     = null

  validation {
    # https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_iam-quotas.html: 64 characters, of which "-trainer" takes 8.
    condition     = var.name == null || length(coalesce(var.name, "-")) <= 56
    error_message = "At most 56 characters: a role's name may have 64."
  }
}

variable "principals" {
  description = <<-EOT
    Who may take each role: ARNs of accounts, roles or users, service accounts of EKS (IRSA), and jobs of an OIDC
    provider (GitHub's, say). A role that nobody may take is not made.
  EOT
  type = map(object({
    arns = optional(list(string), [])
    service_accounts = optional(object({
      provider_arn = string
      subjects     = list(string) # "system:serviceaccount:NAMESPACE:NAME"
    }))
    oidc = optional(object({
      provider_arn = string
      audience     = optional(string, "sts.amazonaws.com")
      subjects     = list(string) # "repo:acme/llm:ref:refs/heads/main"
    }))
  }))
  default = {}

  validation {
    condition     = alltrue([for role in keys(var.principals) : contains(["trainer", "reader", "pruner"], role)])
    error_message = "The roles are trainer, reader and pruner."
  }

  validation {
    condition = alltrue(flatten([
      for role in values(var.principals) : [
        for found in [role.service_accounts, role.oidc] : [
          for subject in try(found.subjects, []) : !can(regex("^(repo:)?[*]", subject))
        ]
      ]
    ]))
    error_message = "A subject that begins with * or repo:* would let everybody at the provider in."
  }
}

variable "versioning" {
  description = "Keep deleted and replaced objects for `noncurrent_days`. They are billed for as long."
  type        = bool
  default     = false
}

variable "noncurrent_days" {
  description = "Days after which deleted and replaced objects of a bucket with versioning are gone for good. What retention deletes is billed until then."
  type        = number
  default     = 3

  validation {
    condition     = var.noncurrent_days >= 1
    error_message = "S3 counts whole days, at least 1."
  }
}

variable "abort_uploads_days" {
  description = "Days after which a multipart upload that nobody completed is aborted. Its parts are billed until then."
  type        = number
  default     = 2

  validation {
    condition     = var.abort_uploads_days >= 1
    error_message = "S3 counts whole days, at least 1."
  }
}

variable "kms_key_arn" {
  description = "A KMS key of your own to encrypt with. Default: the bucket's, SSE-S3, unless `create_kms_key`."
  type        = string
  default     = null
}

variable "create_kms_key" {
  description = "Make a KMS key for this bucket."
  type        = bool
  default     = false
}

variable "log_bucket" {
  description = "A bucket for S3's access logs. Default: none are kept."
  type        = string
  default     = null
}

variable "vpc_endpoint" {
  description = "Make a gateway endpoint, so that traffic to S3 costs nothing and leaves no private network: the VPC and its route tables."
  type = object({
    vpc_id          = string
    route_table_ids = list(string)
  })
  default = null
}

variable "alarm" {
  description = "Publish request metrics of the prefix, and raise an alarm at more than so many failed requests (4xx other than expected, or 5xx) in five minutes. Metrics are billed."
  type = object({
    errors_5xx    = optional(number, 100)
    errors_4xx    = optional(number, 1000)
    alarm_actions = optional(list(string), [])
  })
  default = null
}

variable "force_destroy" {
  description = "Let `terraform destroy` delete a bucket with checkpoints in it."
  type        = bool
  default     = false
}

variable "tags" {
  description = "Tags of everything that takes them."
  type        = map(string)
  default     = {}
}
