# A bucket with its roles. example.tfvars has one for EKS jobs, one for a laptop, one for a nightly prune from GitHub's
# runners: change its names, then `terraform apply -var-file=example.tfvars`.

terraform {
  required_version = ">= 1.6"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.100, < 7.0"
    }
  }
}

variable "bucket" {
  description = "Name of the bucket."
  type        = string
}

variable "region" {
  description = "Where the accelerators are: traffic between regions costs, and is slow."
  type        = string
}

variable "prefix" {
  description = "What all runs lie below."
  type        = string
  default     = "runs"
}

variable "create_kms_key" {
  description = "Encrypt with a key of the bucket's own."
  type        = bool
  default     = false
}

variable "principals" {
  description = "Who may take each role: see the module."
  type        = any
  default     = {}
}

variable "endpoint" {
  description = "Another endpoint than AWS's, for a trial against moto's server."
  type        = string
  default     = null
}

provider "aws" {
  region = var.region

  access_key                  = var.endpoint == null ? null : "test"
  secret_key                  = var.endpoint == null ? null : "test"
  skip_credentials_validation = var.endpoint != null
  skip_metadata_api_check     = var.endpoint != null
  s3_use_path_style           = var.endpoint != null
  # Knowing the account it would ask for a bucket's tags at ACCOUNT.s3-control, a host that only AWS has.
  skip_requesting_account_id = var.endpoint != null

  dynamic "endpoints" {
    for_each = var.endpoint == null ? [] : [var.endpoint]

    content {
      s3         = endpoints.value
      iam        = endpoints.value
      sts        = endpoints.value
      kms        = endpoints.value
      cloudwatch = endpoints.value
      ec2        = endpoints.value
    }
  }
}

module "checkpoints" {
  source = "../../modules/aws"

  bucket         = var.bucket
  prefix         = var.prefix
  create_kms_key = var.create_kms_key
  principals     = var.principals
  force_destroy  = var.endpoint != null
}

output "bucket" {
  description = "The bucket's name."
  value       = module.checkpoints.bucket
}

output "root" {
  description = "The URL below which all runs lie."
  value       = module.checkpoints.root
}

output "roles" {
  description = "ARNs of the roles."
  value       = module.checkpoints.roles
}

output "environment" {
  description = "For a job's environment."
  value       = module.checkpoints.environment
}

output "retention_yaml" {
  description = "A policy to begin with."
  value       = module.checkpoints.retention_yaml
}
