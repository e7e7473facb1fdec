"""What is shown of a result: findings, tables, figures, and the statistics behind verdicts."""
