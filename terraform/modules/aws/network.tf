# The way to S3 that leaves no private network.

resource "aws_vpc_endpoint" "s3" {
  count = var.vpc_endpoint == null ? 0 : 1

  vpc_id            = var.vpc_endpoint.vpc_id
  service_name      = "com.amazonaws.${local.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = var.vpc_endpoint.route_table_ids
  policy            = var.vpc_endpoint.policy
  tags              = merge(var.tags, { Name = "${local.name}-s3" })
}
