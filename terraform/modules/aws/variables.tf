variable "bucket" {
  description = "Name of the bucket to make."
  type        = string

  validation {
    # https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
    condition     = can(regex("^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", var.bucket)) && !strcontains(var.bucket, "..")
    error_message = "A bucket's name has 3 to 63 lower-case letters, digits, dots and dashes, begins and ends with a letter or digit, and has no two dots in a row."
  }
}

variable "prefix" {
  description = "What all runs lie below, without slashes at its ends. The roles reach nothing outside it. Empty for the whole bucket."
  type        = string
  default     = "runs"

  validation {
    condition     = var.prefix == "" || alltrue([for part in split("/", var.prefix) : !contains(["", ".", ".."], part)])
    error_message = "The prefix must neither begin nor end with a slash, nor hold two slashes in a row or a part that is . or .."
  }

  validation {
    condition     = can(regex("^[^*?$\"\\\\[:cntrl:]]*$", var.prefix))
    error_message = "The prefix must not hold one of *?$, which IAM expands, a quote, a backslash or a control character such as a newline."
  }
}

variable "name" {
  description = "What the names of the roles begin with. Default: the bucket's name, which is shortened if it has more than 56 characters."
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
    Who may take each role: ARNs of accounts, roles or users, service accounts of EKS (by IRSA or by EKS Pod Identity),
    and jobs of an OIDC provider (GitHub's, say). A role that is not named is not made. Each of them is named whole,
    without wildcards: for a pattern, write a role of your own with the policies in policies/aws. `service_accounts` are
    those of one cluster, whose provider the role trusts: for a second cluster use `pod_identities`.
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
    pod_identities = optional(list(object({
      cluster         = string
      namespace       = string
      service_account = string
    })), [])
  }))
  default = {}

  validation {
    condition     = alltrue([for role in keys(var.principals) : contains(["trainer", "reader", "pruner"], role)])
    error_message = "The roles are trainer, reader and pruner."
  }

  validation {
    # IAM refuses a role whose trust names nobody, and Terraform drops keys that the type does not have.
    condition = alltrue([
      for role in values(var.principals) :
      length(role.arns) > 0 || role.service_accounts != null || role.oidc != null || length(role.pod_identities) > 0
    ])
    error_message = "Each role that is named needs arns, service_accounts, oidc or pod_identities. If it has one of them, look for a misspelt key: Terraform drops a key that it does not know."
  }

  validation {
    condition = alltrue(flatten([
      for role in values(var.principals) : [
        for arn in role.arns : can(regex("^([0-9]{12}|arn:[a-z-]+:iam::[0-9]{12}:(root|(role|user)/[^*?]+)|arn:[a-z-]+:sts::[0-9]{12}:(assumed-role|federated-user)/[^*?]+)$", arn))
      ]
    ]))
    error_message = "Each of arns is an account's number, or the ARN of an account, a role, a user or a session of theirs, without * and ?: a wildcard would let other accounts take the role. An OIDC provider belongs into service_accounts or oidc."
  }

  validation {
    condition = alltrue(flatten([
      for role in values(var.principals) : [
        for found in [role.service_accounts, role.oidc] : try(length(found.subjects) > 0, true)
      ]
    ]))
    error_message = "A role with service_accounts or oidc names at least one of their subjects, or nobody may take it."
  }

  validation {
    condition = alltrue(flatten([
      for role in values(var.principals) : [
        for found in [role.service_accounts, role.oidc] : [
          for subject in try(found.subjects, []) : can(regex("^[^*?$]+$", subject))
        ]
      ]
    ]))
    error_message = "Each subject is written whole, without *, ? and $: a pattern would let in every job or service account of the provider that fits it, those of strangers among them."
  }

  validation {
    condition = alltrue(flatten([
      for role in values(var.principals) : [
        for found in [role.service_accounts, role.oidc] : found == null || can(regex("^arn:[a-z-]+:iam::[0-9]{12}:oidc-provider/[^*?$]+$", found.provider_arn))
      ]
    ]))
    error_message = "A provider_arn is the ARN of an OIDC provider of IAM: arn:aws:iam::ACCOUNT:oidc-provider/HOST."
  }

  validation {
    condition = alltrue(flatten([
      for role in values(var.principals) : [
        for pod in role.pod_identities : can(regex("^[^*?$]+ [^*?$]+ [^*?$]+$", "${pod.cluster} ${pod.namespace} ${pod.service_account}"))
      ]
    ]))
    error_message = "The cluster, the namespace and the service account of a pod identity are written whole, without *, ? and $: a pattern would let in other pods."
  }
}

variable "permissions_boundary" {
  description = "ARN of a policy that bounds what each role may do, where the account asks for one."
  type        = string
  default     = null
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

variable "kms_key" {
  description = "A KMS key of your own to encrypt with. Default: the bucket's, SSE-S3, unless `create_kms_key`. An object, so that the ARN may be that of a key which the same configuration makes."
  type = object({
    arn = string
  })
  default = null

  validation {
    condition     = var.kms_key == null || can(regex("^arn:[a-z-]+:kms:[a-z0-9-]+:[0-9]{12}:key/[a-zA-Z0-9-]+$", var.kms_key.arn))
    error_message = "The ARN of a key is arn:aws:kms:REGION:ACCOUNT:key/ID. A role's policy takes neither an alias nor an ID alone."
  }
}

variable "create_kms_key" {
  description = "Make a KMS key for this bucket."
  type        = bool
  default     = false
}

variable "log_bucket" {
  description = <<-EOT
    A bucket for access logs. Default: none are kept. The policy of that bucket has to let the service
    logging.s3.amazonaws.com do s3:PutObject on arn:aws:s3:::LOG_BUCKET/BUCKET/*, or S3 answers
    InvalidTargetBucketForLogging. An object, so that the name may be that of a bucket which the same configuration makes.
  EOT
  type = object({
    name = string
  })
  default = null
}

variable "vpc_endpoint" {
  description = "Make a gateway endpoint, so that traffic to S3 costs nothing and leaves no private network: the VPC and its route tables. `policy`, in JSON, says what may pass; default: everything that a role may do."
  type = object({
    vpc_id          = string
    route_table_ids = list(string)
    policy          = optional(string)
  })
  default = null
}

variable "alarm" {
  description = "Publish request metrics of the prefix, and raise an alarm at more than so many failed requests (4xx or 5xx) in five minutes. The 4xx include the 404 of each save that asks whether its checkpoint exists. Metrics are billed."
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
