# A configuration that makes a key and a bucket for logs beside the module: neither is known when it is planned.

terraform {
  required_providers {
    # Named here too, or the module would not get the tests' mock of it.
    aws = {
      source = "hashicorp/aws"
    }
  }
}

resource "terraform_data" "key" {
  input = "arn:aws:kms:eu-west-1:123456789012:key/0123-abcd"
}

resource "terraform_data" "logs" {
  input = "acme-logs"
}

module "checkpoints" {
  source = "../.."

  bucket     = "acme-checkpoints"
  kms_key    = { arn = terraform_data.key.output }
  log_bucket = { name = terraform_data.logs.output }
  principals = { trainer = { arns = ["arn:aws:iam::123456789012:root"] } }
}

output "roles" {
  description = "The roles that are made."
  value       = toset(keys(module.checkpoints.roles))
}
