# Plans against a mocked provider: no account, no network.

mock_provider "aws" {
  mock_data "aws_partition" {
    defaults = { partition = "aws", dns_suffix = "amazonaws.com" }
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
    error_message = "a role was made that nobody asked for"
  }
}

run "a_role_that_is_not_named_is_not_made" {
  command = plan

  variables {
    principals     = { trainer = { arns = ["arn:aws:iam::123456789012:root"] } }
    create_kms_key = true
  }

  assert {
    condition     = toset(keys(aws_iam_role.this)) == toset(["trainer"]) && toset(keys(aws_iam_role_policy.key)) == toset(["trainer"])
    error_message = "a role was made that nobody asked for"
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

run "any_account_is_refused" {
  command = plan

  variables {
    principals = { trainer = { arns = ["*"] } }
  }

  expect_failures = [var.principals]
}

run "any_user_of_an_account_is_refused" {
  command = plan

  variables {
    principals = { trainer = { arns = ["arn:aws:iam::123456789012:user/*"] } }
  }

  expect_failures = [var.principals]
}

run "any_job_of_a_provider_is_refused" {
  command = plan

  variables {
    principals = { trainer = { oidc = { provider_arn = "arn:aws:iam::123456789012:oidc-provider/x", subjects = ["*"] } } }
  }

  expect_failures = [var.principals]
}

run "any_repository_that_fits_a_pattern_is_refused" {
  command = plan

  variables {
    principals = { trainer = { oidc = { provider_arn = "arn:aws:iam::123456789012:oidc-provider/x", subjects = ["repo:acm?/*"] } } }
  }

  expect_failures = [var.principals]
}

run "subjects_that_begin_alike_are_refused" {
  command = plan

  variables {
    principals = { trainer = { oidc = { provider_arn = "arn:aws:iam::123456789012:oidc-provider/x", subjects = ["r*"] } } }
  }

  expect_failures = [var.principals]
}

run "any_branch_of_a_repository_is_refused" {
  command = plan

  variables {
    principals = { trainer = { oidc = { provider_arn = "arn:aws:iam::123456789012:oidc-provider/x", subjects = ["repo:acme/llm:*"] } } }
  }

  expect_failures = [var.principals]
}

run "a_variable_of_iam_in_a_subject_is_refused" {
  command = plan

  variables {
    principals = { trainer = { oidc = { provider_arn = "arn:aws:iam::123456789012:oidc-provider/x", subjects = ["repo:$${aws:username}"] } } }
  }

  expect_failures = [var.principals]
}

run "any_service_account_of_a_cluster_is_refused" {
  command = plan

  variables {
    principals = { trainer = { service_accounts = { provider_arn = "arn:aws:iam::123456789012:oidc-provider/x", subjects = ["system:serviceaccount:*"] } } }
  }

  expect_failures = [var.principals]
}

run "a_provider_that_is_no_oidc_provider_is_refused" {
  command = plan

  variables {
    principals = { trainer = { oidc = { provider_arn = "https://token.actions.githubusercontent.com", subjects = ["repo:acme/llm:ref:refs/heads/main"] } } }
  }

  expect_failures = [var.principals]
}

run "any_pod_of_a_namespace_is_refused" {
  command = plan

  variables {
    principals = { trainer = { pod_identities = [{ cluster = "gpu", namespace = "train", service_account = "*" }] } }
  }

  expect_failures = [var.principals]
}

run "who_is_trusted_is_compared_whole" {
  command = plan

  variables {
    principals = {
      pruner = {
        oidc = {
          provider_arn = "arn:aws:iam::123456789012:oidc-provider/token.actions.githubusercontent.com"
          subjects     = ["repo:acme/llm:ref:refs/heads/main"]
        }
      }
    }
  }

  assert {
    condition = alltrue([
      for condition in data.aws_iam_policy_document.trust["pruner"].statement[0].condition : condition.test == "StringEquals"
    ])
    error_message = "a subject is taken for a pattern"
  }
}

run "a_pod_identity_is_bound_to_its_cluster_namespace_and_service_account" {
  command = plan

  variables {
    principals = {
      trainer = { pod_identities = [{ cluster = "gpu", namespace = "train", service_account = "trainer" }] }
    }
    permissions_boundary = "arn:aws:iam::123456789012:policy/boundary"
  }

  assert {
    condition     = aws_eks_pod_identity_association.this["trainer gpu train/trainer"].service_account == "trainer"
    error_message = "the service account has no association"
  }

  assert {
    condition = toset([
      for condition in data.aws_iam_policy_document.trust["trainer"].statement[0].condition : "${condition.variable}=${one(condition.values)}"
      ]) == toset([
      "aws:RequestTag/eks-cluster-name=gpu",
      "aws:RequestTag/kubernetes-namespace=train",
      "aws:RequestTag/kubernetes-service-account=trainer",
    ])
    error_message = "another pod may take the role"
  }

  assert {
    condition     = aws_iam_role.this["trainer"].permissions_boundary == "arn:aws:iam::123456789012:policy/boundary"
    error_message = "the role has no permissions boundary"
  }
}

run "a_bucket_with_the_longest_name_has_roles" {
  command = plan

  variables {
    bucket     = "acme-llm-checkpoints-of-the-research-cluster-in-europe-west-1ab"
    principals = { trainer = { arns = ["123456789012"] } }
  }

  assert {
    condition     = length(var.bucket) == 63 && length(aws_iam_role.this["trainer"].name) == 64
    error_message = "the role's name is not the longest that IAM takes"
  }
}

run "a_bucket_with_dots_has_a_key" {
  command = plan

  variables {
    bucket         = "checkpoints.acme.example"
    create_kms_key = true
  }

  assert {
    condition     = can(regex("^alias/checkpoints-acme-example-[0-9a-f]{8}$", aws_kms_alias.this[0].name))
    error_message = "KMS takes no dots in an alias, and checkpoints-acme-example may be another bucket"
  }
}

run "a_bucket_without_dots_gives_its_key_its_own_name" {
  command = plan

  variables {
    create_kms_key = true
  }

  assert {
    condition     = aws_kms_alias.this[0].name == "alias/acme-checkpoints"
    error_message = "the alias is another"
  }
}

run "a_key_and_a_bucket_for_logs_may_be_made_in_the_same_plan" {
  command = plan

  module {
    source = "./tests/made_beside"
  }

  assert {
    condition     = output.roles == toset(["trainer"])
    error_message = "the roles are others"
  }
}

run "a_policy_keeps_a_prefix_that_yaml_would_read_otherwise" {
  command = plan

  variables {
    prefix = "llm #1: trial"
  }

  assert {
    condition     = yamldecode(output.retention_yaml).root == "s3://acme-checkpoints/llm #1: trial/$${RUN_NAME}"
    error_message = "the policy is for another root"
  }
}

run "an_endpoint_lets_through_what_its_policy_says" {
  command = plan

  variables {
    vpc_endpoint = { vpc_id = "vpc-1", route_table_ids = ["rtb-1"], policy = "{\"Version\": \"2012-10-17\", \"Statement\": []}" }
  }

  assert {
    condition     = jsondecode(aws_vpc_endpoint.s3[0].policy).Statement == []
    error_message = "the endpoint has another policy"
  }
}

run "a_name_with_capitals_is_refused_for_a_bucket" {
  command = plan

  variables {
    bucket = "Acme_Bad"
  }

  expect_failures = [var.bucket]
}

run "a_name_that_ends_with_a_dot_is_refused_for_a_bucket" {
  command = plan

  variables {
    bucket = "bad-bucket."
  }

  expect_failures = [var.bucket]
}

run "two_slashes_in_a_prefix_are_refused" {
  command = plan

  variables {
    prefix = "a//b"
  }

  expect_failures = [var.prefix]
}

run "a_prefix_that_leads_out_of_itself_is_refused" {
  command = plan

  variables {
    prefix = "../x"
  }

  expect_failures = [var.prefix]
}

run "a_newline_in_a_prefix_is_refused" {
  command = plan

  variables {
    prefix = "a\nb"
  }

  expect_failures = [var.prefix]
}

run "a_role_that_nobody_may_take_is_refused" {
  command = plan

  variables {
    principals = { reader = {} }
  }

  expect_failures = [var.principals]
}

run "a_misspelt_key_of_a_role_is_refused" {
  command = plan

  variables {
    principals = { trainer = { service_account = { provider_arn = "arn:aws:iam::123456789012:oidc-provider/x", subjects = ["system:serviceaccount:train:trainer"] } } }
  }

  expect_failures = [var.principals]
}

run "a_provider_without_subjects_is_refused" {
  command = plan

  variables {
    principals = { trainer = { service_accounts = { provider_arn = "arn:aws:iam::123456789012:oidc-provider/x", subjects = [] } } }
  }

  expect_failures = [var.principals]
}

run "an_oidc_provider_among_the_arns_is_refused" {
  command = plan

  variables {
    principals = { trainer = { arns = ["arn:aws:iam::123456789012:oidc-provider/x"] } }
  }

  expect_failures = [var.principals]
}

run "an_alias_of_a_key_is_refused" {
  command = plan

  variables {
    kms_key = { arn = "alias/mykey" }
  }

  expect_failures = [var.kms_key]
}

run "a_given_key_beside_a_new_one_is_refused" {
  command = plan

  variables {
    kms_key        = { arn = "arn:aws:kms:eu-west-1:123456789012:key/0123-abcd" }
    create_kms_key = true
  }

  expect_failures = [aws_s3_bucket.this]
}
