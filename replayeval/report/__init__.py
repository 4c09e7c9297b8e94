"""What a measurement looks like: a record with a schema, tables, figures and a notebook view. Never loads torch."""
