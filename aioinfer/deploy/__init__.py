"""Replicas and gateways under Ray Serve. All that is specific to Serve is in this package; it needs
the extra `aioinfer[ray]`."""
