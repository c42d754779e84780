# Who may do what. The rights are those of policies/aws at the root of this repository; its tests hold MinIO to the same.

locals {
  # The bucket first: its name is in lower case, while a prefix may hold either word.
  policies = {
    for role in ["trainer", "reader", "pruner"] : role => replace(replace(replace(
      file("${path.module}/../../../policies/aws/${role}.json"),
      "BUCKET", var.bucket),
      "PREFIX/", local.below),
      "arn:aws:", "arn:${local.partition}:"
    )
  }

  pods = merge([
    for role, found in var.principals : {
      for pod in found.pod_identities : "${role} ${pod.cluster} ${pod.namespace}/${pod.service_account}" => merge(pod, { role = role })
    }
  ]...)

  kms_actions = {
    trainer = ["kms:Decrypt", "kms:GenerateDataKey"]
    reader  = ["kms:Decrypt"]
    pruner  = ["kms:Decrypt", "kms:GenerateDataKey"]
  }
}

data "aws_iam_policy_document" "trust" {
  for_each = var.principals

  dynamic "statement" {
    for_each = length(each.value.arns) > 0 ? [each.value.arns] : []

    content {
      actions = ["sts:AssumeRole"]

      principals {
        type        = "AWS"
        identifiers = statement.value
      }
    }
  }

  dynamic "statement" {
    for_each = [for found in [each.value.service_accounts, each.value.oidc] : found if found != null]

    content {
      actions = ["sts:AssumeRoleWithWebIdentity"]

      principals {
        type        = "Federated"
        identifiers = [statement.value.provider_arn]
      }

      condition {
        test     = "StringEquals"
        variable = "${split("oidc-provider/", statement.value.provider_arn)[1]}:aud"
        values   = [try(statement.value.audience, "sts.amazonaws.com")]
      }

      condition {
        test     = "StringEquals"
        variable = "${split("oidc-provider/", statement.value.provider_arn)[1]}:sub"
        values   = statement.value.subjects
      }
    }
  }

  # One for each pod identity: the values of one statement would combine the namespace of one with the name of another.
  dynamic "statement" {
    for_each = each.value.pod_identities

    content {
      actions = ["sts:AssumeRole", "sts:TagSession"]

      principals {
        type        = "Service"
        identifiers = ["pods.eks.amazonaws.com"]
      }

      # Tags that EKS sets: https://docs.aws.amazon.com/eks/latest/userguide/pod-id-abac.html
      dynamic "condition" {
        for_each = {
          "eks-cluster-name"           = statement.value.cluster
          "kubernetes-namespace"       = statement.value.namespace
          "kubernetes-service-account" = statement.value.service_account
        }

        content {
          test     = "StringEquals"
          variable = "aws:RequestTag/${condition.key}"
          values   = [condition.value]
        }
      }
    }
  }
}

resource "aws_iam_role" "this" {
  for_each = var.principals

  name               = "${local.name}-${each.key}"
  description        = "bucketpoint ${each.key} of s3://${var.bucket}/${local.below}"
  assume_role_policy = data.aws_iam_policy_document.trust[each.key].json
  # A training job outlives the default of an hour; its credentials are renewed all the same.
  max_session_duration = 43200
  permissions_boundary = var.permissions_boundary
  tags                 = var.tags
}

resource "aws_eks_pod_identity_association" "this" {
  for_each = local.pods

  cluster_name    = each.value.cluster
  namespace       = each.value.namespace
  service_account = each.value.service_account
  role_arn        = aws_iam_role.this[each.value.role].arn
  tags            = var.tags
}

resource "aws_iam_role_policy" "objects" {
  for_each = var.principals

  name   = "checkpoints"
  role   = aws_iam_role.this[each.key].id
  policy = local.policies[each.key]
}

data "aws_iam_policy_document" "key" {
  for_each = local.own_key ? local.kms_actions : {}

  statement {
    actions   = each.value
    resources = [local.kms_key]

    condition {
      test     = "StringEquals"
      variable = "kms:ViaService"
      # China's services end in another suffix; AWS's documents name only the first.
      values = distinct([for suffix in ["amazonaws.com", data.aws_partition.current.dns_suffix] : "s3.${local.region}.${suffix}"])
    }
  }
}

resource "aws_iam_role_policy" "key" {
  for_each = local.own_key ? var.principals : {}

  name   = "key"
  role   = aws_iam_role.this[each.key].id
  policy = data.aws_iam_policy_document.key[each.key].json
}
