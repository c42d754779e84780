# Who may do what. The rights are those of policies/ at the root of this repository, which its tests hold MinIO to.

locals {
  # IAM refuses a role whose trust names nobody.
  roles = {
    for role, found in var.principals : role => found
    if length(found.arns) > 0 || found.service_accounts != null || found.oidc != null
  }

  # The bucket first: its name is in lower case, while a prefix may hold either word.
  policies = {
    for role in ["trainer", "reader", "pruner"] : role => replace(replace(replace(replace(
      file("${path.module}/../../../policies/${role}.json"),
      "BUCKET", var.bucket),
      "PREFIX/", local.below),
      "arn:aws:", "arn:${local.partition}:"),
      # A GET has no prefix. Without IfExists, S3 would answer 403 instead of 404 for a missing object. MinIO has no IfExists.
      "\"StringLike\"", "\"StringLikeIfExists\""
    )
  }

  kms_actions = {
    trainer = ["kms:Decrypt", "kms:GenerateDataKey"]
    reader  = ["kms:Decrypt"]
    pruner  = ["kms:Decrypt", "kms:GenerateDataKey"]
  }
}

data "aws_iam_policy_document" "trust" {
  for_each = local.roles

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
        test     = "StringLike"
        variable = "${split("oidc-provider/", statement.value.provider_arn)[1]}:sub"
        values   = statement.value.subjects
      }
    }
  }
}

resource "aws_iam_role" "this" {
  for_each = local.roles

  name               = "${local.name}-${each.key}"
  description        = "bucketpoint ${each.key} of s3://${var.bucket}/${local.below}"
  assume_role_policy = data.aws_iam_policy_document.trust[each.key].json
  # A training job outlives the default of an hour; its credentials are renewed all the same.
  max_session_duration = 43200
  tags                 = var.tags
}

resource "aws_iam_role_policy" "objects" {
  for_each = local.roles

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
      values   = ["s3.${data.aws_region.current.region}.amazonaws.com"]
    }
  }
}

resource "aws_iam_role_policy" "key" {
  for_each = local.own_key ? local.roles : {}

  name   = "key"
  role   = aws_iam_role.this[each.key].id
  policy = data.aws_iam_policy_document.key[each.key].json
}
