bucket         = "acme-checkpoints"
region         = "eu-west-1"
prefix         = "llm"
create_kms_key = true

principals = {
  # Jobs of one EKS cluster, by IRSA. For several clusters, by EKS Pod Identity:
  # pod_identities = [{ cluster = "gpu", namespace = "train", service_account = "trainer" }]
  trainer = {
    service_accounts = {
      provider_arn = "arn:aws:iam::123456789012:oidc-provider/oidc.eks.eu-west-1.amazonaws.com/id/0123456789ABCDEF"
      subjects     = ["system:serviceaccount:train:trainer"]
    }
  }

  # Who looks at checkpoints from a laptop.
  reader = {
    arns = ["arn:aws:iam::123456789012:role/researcher"]
  }

  # A nightly prune on GitHub's runners.
  pruner = {
    oidc = {
      provider_arn = "arn:aws:iam::123456789012:oidc-provider/token.actions.githubusercontent.com"
      subjects     = ["repo:acme/llm:ref:refs/heads/main"]
    }
  }
}
