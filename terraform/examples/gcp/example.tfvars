project        = "acme"
bucket         = "acme-checkpoints"
region         = "europe-west4"
prefix         = "llm"
create_kms_key = true

members = {
  # Jobs on GKE, in this project.
  trainer = {
    kubernetes = ["train/trainer"]
  }

  # Who looks at checkpoints from a laptop.
  reader = {
    principals = ["group:research@acme.com"]
  }

  # A nightly prune on GitHub's runners.
  pruner = {
    principals = [
      "principalSet://iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/attribute.repository/acme/llm"
    ]
  }
}
