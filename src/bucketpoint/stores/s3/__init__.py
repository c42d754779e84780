"""Amazon S3 and other services with the S3 protocol, through boto3 or the AWS Common Runtime."""
