# Requests that fail, counted and told.

resource "aws_s3_bucket_metric" "prefix" {
  count = var.alarm == null ? 0 : 1

  bucket = aws_s3_bucket.this.id
  name   = "checkpoints"

  dynamic "filter" {
    for_each = var.prefix == "" ? [] : [local.below]

    content {
      prefix = filter.value
    }
  }
}

resource "aws_cloudwatch_metric_alarm" "errors" {
  # A save asks whether its checkpoint exists, and is answered 404: some 4xx are the normal course of things.
  for_each = var.alarm == null ? {} : { "4xxErrors" = var.alarm.errors_4xx, "5xxErrors" = var.alarm.errors_5xx }

  alarm_name          = "${local.name}-${each.key}"
  alarm_description   = "Requests to s3://${var.bucket}/${local.below} fail (${each.key}): saves may be late"
  namespace           = "AWS/S3"
  metric_name         = each.key
  statistic           = "Sum"
  period              = 300
  evaluation_periods  = 1
  threshold           = each.value
  comparison_operator = "GreaterThanThreshold"
  treat_missing_data  = "notBreaching"
  alarm_actions       = var.alarm.alarm_actions
  tags                = var.tags

  dimensions = {
    BucketName = aws_s3_bucket.this.id
    FilterId   = aws_s3_bucket_metric.prefix[0].name
  }
}
