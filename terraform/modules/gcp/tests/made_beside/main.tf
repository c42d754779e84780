# A configuration that makes a key and a bucket for logs beside the module: neither is known when it is planned.

terraform {
  required_providers {
    # Named here too, or the module would not get the tests' mock of it.
    google = {
      source = "hashicorp/google"
    }
  }
}

resource "terraform_data" "key" {
  input = "projects/acme/locations/europe-west4/keyRings/r/cryptoKeys/k"
}

resource "terraform_data" "logs" {
  input = "acme-logs"
}

module "checkpoints" {
  source = "../.."

  project    = "acme"
  bucket     = "acme-checkpoints"
  location   = "europe-west4"
  kms_key    = { name = terraform_data.key.output }
  log_bucket = { name = terraform_data.logs.output }
}

output "bucket" {
  description = "The bucket that is made."
  value       = module.checkpoints.bucket
}
