# A bucket for checkpoints. What retention deletes is gone, and what a dead job left is not billed for ever.

data "aws_partition" "current" {}
data "aws_region" "current" {}
data "aws_caller_identity" "current" {}

locals {
  # A role's name may have 64 characters, of which "-trainer" takes 8, and a bucket's 63.
  short_name = length(var.bucket) <= 56 ? var.bucket : "${substr(var.bucket, 0, 47)}-${substr(sha256(var.bucket), 0, 8)}"
  name       = coalesce(var.name, local.short_name)
  below      = var.prefix == "" ? "" : "${var.prefix}/"
  partition  = data.aws_partition.current.partition
  bucket_arn = "arn:${local.partition}:s3:::${var.bucket}"
  # Known before anything is made, unlike the key itself: how many policies there are depends on it.
  own_key = var.create_kms_key || var.kms_key != null
  kms_key = var.create_kms_key ? aws_kms_key.this[0].arn : one(var.kms_key[*].arn)
  # Version 5 of the provider calls it name, version 6 region; whoever writes .name is warned by version 6.
  region = lookup(data.aws_region.current, "region", lookup(data.aws_region.current, "name", null))
}

resource "aws_s3_bucket" "this" {
  # checkov:skip=CKV_AWS_144: copies in another region are for whoever needs them; each costs the bucket once more
  # checkov:skip=CKV2_AWS_62: nothing listens to events of this bucket
  # checkov:skip=CKV_AWS_18: access logs where log_bucket names a bucket for them
  # checkov:skip=CKV_AWS_21: versions keep what retention deletes, at full price; the variable versioning switches them on
  # checkov:skip=CKV_AWS_145: SSE-S3 unless a key is named; each request to KMS costs, and is limited by its quota
  bucket        = var.bucket
  force_destroy = var.force_destroy
  tags          = var.tags

  lifecycle {
    # Not a validation: before Terraform 1.9 one variable cannot be compared with another.
    precondition {
      condition     = !var.create_kms_key || var.kms_key == null
      error_message = "kms_key names a key, and create_kms_key asks for a new one: set one of them."
    }
  }
}

resource "aws_s3_bucket_public_access_block" "this" {
  bucket                  = aws_s3_bucket.this.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    # One data key for many objects: a save of ten thousand parts is not ten thousand requests to KMS.
    bucket_key_enabled = local.own_key

    apply_server_side_encryption_by_default {
      sse_algorithm     = local.own_key ? "aws:kms" : "AES256"
      kms_master_key_id = local.kms_key
    }
  }
}

resource "aws_s3_bucket_versioning" "this" {
  # Not "Suspended" from the start: every delete would leave a marker behind. Switched off later, it is suspended.
  count = var.versioning ? 1 : 0

  bucket = aws_s3_bucket.this.id

  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "this" {
  bucket = aws_s3_bucket.this.id
  # S3 refuses rules for versions while versioning is being changed.
  depends_on = [aws_s3_bucket_versioning.this]

  rule {
    id     = "abort-incomplete-uploads"
    status = "Enabled"

    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = var.abort_uploads_days
    }
  }

  rule {
    id     = "forget-what-was-deleted"
    status = "Enabled"

    filter {}

    noncurrent_version_expiration {
      noncurrent_days = var.noncurrent_days
    }

    expiration {
      expired_object_delete_marker = true
    }
  }
}

resource "aws_s3_bucket_logging" "this" {
  count = var.log_bucket == null ? 0 : 1

  bucket        = aws_s3_bucket.this.id
  target_bucket = var.log_bucket.name
  target_prefix = "${var.bucket}/"
}

data "aws_iam_policy_document" "bucket" {
  statement {
    sid       = "OnlyOverTLS"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [local.bucket_arn, "${local.bucket_arn}/*"]

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

resource "aws_s3_bucket_policy" "this" {
  bucket = aws_s3_bucket.this.id
  policy = data.aws_iam_policy_document.bucket.json
  # A policy that is put while public access is being blocked may be refused.
  depends_on = [aws_s3_bucket_public_access_block.this]
}
