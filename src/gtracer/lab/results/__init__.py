"""What runs leave: records, statistics over them, reports."""
