# A bucket with its roles. example.tfvars has one for GKE jobs, one for a laptop, one for a nightly prune from GitHub's
# runners: change its names, then `terraform apply -var-file=example.tfvars`.

terraform {
  required_version = ">= 1.6"

  required_providers {
    google = {
      source  = "hashicorp/google"
      version = ">= 6.0, < 9.0"
    }
  }
}

variable "project" {
  description = "The project."
  type        = string
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

variable "members" {
  description = "Who may act as each role's service account: see the module."
  type        = any
  default     = {}
}

provider "google" {
  project = var.project
  region  = var.region
}

module "checkpoints" {
  source = "../../modules/gcp"

  project        = var.project
  bucket         = var.bucket
  location       = var.region
  prefix         = var.prefix
  create_kms_key = var.create_kms_key
  members        = var.members
}

output "bucket" {
  description = "The bucket's name."
  value       = module.checkpoints.bucket
}

output "root" {
  description = "The URL below which all runs lie."
  value       = module.checkpoints.root
}

output "service_accounts" {
  description = "E-mail addresses of the roles' service accounts."
  value       = module.checkpoints.service_accounts
}

output "environment" {
  description = "For a job's environment."
  value       = module.checkpoints.environment
}

output "retention_yaml" {
  description = "A policy to begin with."
  value       = module.checkpoints.retention_yaml
}
