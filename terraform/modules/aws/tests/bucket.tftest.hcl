# Plans against a mocked provider: no account, no network.

mock_provider "aws" {
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{\"Version\": \"2012-10-17\", \"Statement\": []}" }
  }
}

variables {
  bucket = "acme-checkpoints"
}

run "a_bucket_is_closed_and_frees_what_is_deleted" {
  command = plan

  assert {
    condition     = aws_s3_bucket_public_access_block.this.block_public_policy && aws_s3_bucket_public_access_block.this.restrict_public_buckets
    error_message = "public access is not blocked"
  }

  assert {
    condition     = length(aws_s3_bucket_versioning.this) == 0
    error_message = "versions, or the markers of deletes, would keep what retention deletes"
  }

  assert {
    condition     = length(aws_iam_role.this) == 0
    error_message = "a role was made that nobody may take"
  }
}

run "a_role_that_nobody_may_take_is_not_made" {
  command = plan

  variables {
    principals     = { trainer = { arns = ["arn:aws:iam::123456789012:root"] }, reader = {} }
    create_kms_key = true
  }

  assert {
    condition     = toset(keys(aws_iam_role.this)) == toset(["trainer"]) && toset(keys(aws_iam_role_policy.key)) == toset(["trainer"])
    error_message = "a role was made that nobody may take"
  }
}

run "roles_reach_nothing_outside_the_prefix" {
  command = plan

  variables {
    principals = {
      for role in ["trainer", "reader", "pruner"] : role => { arns = ["arn:aws:iam::123456789012:root"] }
    }
  }

  assert {
    condition = alltrue([
      for policy in values(aws_iam_role_policy.objects) : alltrue([
        for statement in jsondecode(policy.policy).Statement : alltrue([
          for resource in statement.Resource :
          startswith(resource, "arn:aws:s3:::acme-checkpoints/runs/") || resource == "arn:aws:s3:::acme-checkpoints"
        ])
      ])
    ])
    error_message = "a role reaches other objects"
  }

  assert {
    condition     = !strcontains(aws_iam_role_policy.objects["reader"].policy, "Put") && !strcontains(aws_iam_role_policy.objects["reader"].policy, "Delete")
    error_message = "a reader may write"
  }
}

run "requests_that_fail_raise_an_alarm" {
  command = plan

  variables {
    alarm = { errors_5xx = 7, alarm_actions = ["arn:aws:sns:eu-west-1:123456789012:pager"] }
  }

  assert {
    condition     = aws_s3_bucket_metric.prefix[0].filter[0].prefix == "runs/"
    error_message = "the metrics are of other requests"
  }

  assert {
    condition     = aws_cloudwatch_metric_alarm.errors["5xxErrors"].threshold == 7 && aws_cloudwatch_metric_alarm.errors["4xxErrors"].threshold == 1000
    error_message = "the alarm is raised at another number"
  }
}

run "a_policy_to_begin_with_names_the_root" {
  command = plan

  assert {
    condition     = yamldecode(output.retention_yaml).root == "s3://acme-checkpoints/runs/$${RUN_NAME}" && output.environment.BUCKETPOINT_ROOT == "s3://acme-checkpoints/runs"
    error_message = "the policy or the environment is for another root"
  }
}

run "an_unknown_role_is_refused" {
  command = plan

  variables {
    principals = { admin = {} }
  }

  expect_failures = [var.principals]
}

run "a_prefix_that_iam_would_expand_is_refused" {
  command = plan

  variables {
    prefix = "runs/$${aws:username}"
  }

  expect_failures = [var.prefix]
}

run "a_subject_that_lets_everybody_in_is_refused" {
  command = plan

  variables {
    principals = { trainer = { oidc = { provider_arn = "arn:aws:iam::1:oidc-provider/x", subjects = ["*"] } } }
  }

  expect_failures = [var.principals]
}
