# A bucket with a role for GKE jobs and one for a nightly prune.

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

  project  = var.project
  bucket   = var.bucket
  location = var.region
  members  = var.members
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
