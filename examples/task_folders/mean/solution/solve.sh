#!/bin/bash
cat > /app/statistics_of.py <<'PY'
def mean(numbers):
    return sum(numbers) / len(numbers) if numbers else 0
PY
