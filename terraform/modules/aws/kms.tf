# A key of the bucket's own, where it is asked for.

locals {
  # An alias has no dots; the names of buckets and roles may. The hash tells acme.ckpt from acme-ckpt.
  plain_name = replace(local.name, "/[^a-zA-Z0-9_-]/", "-")
  alias      = local.plain_name == local.name ? local.name : "${local.plain_name}-${substr(sha256(local.name), 0, 8)}"
}

data "aws_iam_policy_document" "kms" {
  # checkov:skip=CKV_AWS_109: the policy of a key speaks of this key alone, whatever its resource says
  # checkov:skip=CKV_AWS_111: as above
  # checkov:skip=CKV_AWS_356: as above
  count = var.create_kms_key ? 1 : 0

  # Without it nobody but AWS's support could change the key's policy again.
  statement {
    sid       = "TheAccountsPoliciesDecide"
    actions   = ["kms:*"]
    resources = ["*"]

    principals {
      type        = "AWS"
      identifiers = ["arn:${local.partition}:iam::${data.aws_caller_identity.current.account_id}:root"]
    }
  }
}

resource "aws_kms_key" "this" {
  count = var.create_kms_key ? 1 : 0

  description             = "bucketpoint checkpoints in ${var.bucket}"
  enable_key_rotation     = true
  deletion_window_in_days = 30
  policy                  = data.aws_iam_policy_document.kms[0].json
  tags                    = var.tags
}

resource "aws_kms_alias" "this" {
  count = var.create_kms_key ? 1 : 0

  name          = "alias/${local.alias}"
  target_key_id = aws_kms_key.this[0].key_id
}
