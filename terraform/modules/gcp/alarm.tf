# Requests that GCS failed or throttled, counted and told.

resource "google_monitoring_alert_policy" "errors" {
  count = var.alarm == null ? 0 : 1

  project               = var.project
  display_name          = "${local.name}: requests to gs://${var.bucket} fail"
  combiner              = "OR"
  notification_channels = var.alarm.notification_channels
  user_labels           = var.labels

  conditions {
    display_name = "requests that GCS failed or throttled"

    condition_threshold {
      filter = join(" AND ", [
        "resource.type = \"gcs_bucket\"",
        "resource.labels.bucket_name = \"${var.bucket}\"",
        "metric.type = \"storage.googleapis.com/api/request_count\"",
        # A save asks whether its checkpoint exists: NOT_FOUND and FAILED_PRECONDITION are the normal course of things.
        "metric.labels.response_code = one_of(\"INTERNAL\", \"UNAVAILABLE\", \"RESOURCE_EXHAUSTED\", \"DEADLINE_EXCEEDED\")",
      ])
      comparison      = "COMPARISON_GT"
      threshold_value = var.alarm.errors
      duration        = "0s"

      aggregations {
        alignment_period     = "300s"
        per_series_aligner   = "ALIGN_DELTA"
        cross_series_reducer = "REDUCE_SUM"
      }
    }
  }
}
