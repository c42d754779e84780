output "bucket" {
  description = "The bucket's name."
  value       = aws_s3_bucket.this.bucket
}

output "bucket_arn" {
  description = "The bucket's ARN, for policies of your own."
  value       = aws_s3_bucket.this.arn
}

output "root" {
  description = "The URL below which all runs lie."
  value       = trimsuffix("s3://${aws_s3_bucket.this.bucket}/${local.below}", "/")
}

output "roles" {
  description = "ARNs of the roles that were made."
  value       = { for role, made in aws_iam_role.this : role => made.arn }
}

output "kms_key_arn" {
  description = "The key that objects are encrypted with; null for SSE-S3."
  value       = local.kms_key
}

output "vpc_endpoint_id" {
  description = "The gateway endpoint; null if none was asked for."
  value       = one(aws_vpc_endpoint.s3[*].id)
}

output "environment" {
  description = "What a job's environment wants: `terraform output -json environment`."
  value = {
    AWS_REGION       = local.region
    BUCKETPOINT_ROOT = trimsuffix("s3://${aws_s3_bucket.this.bucket}/${local.below}", "/")
  }
}

output "retention_yaml" {
  description = "A policy for a run below the root: `terraform output -raw retention_yaml > retention.yaml`."
  value = templatefile("${path.module}/../retention.yaml.tftpl", {
    root = trimsuffix("s3://${aws_s3_bucket.this.bucket}/${local.below}", "/")
  })
}
