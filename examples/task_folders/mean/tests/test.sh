#!/bin/bash
# Each case is a process of its own, which answers on its output; the share of right answers is the reward.
right=0
for case in "[4] 4.0" "[1, 2, 6] 3.0" "[] 0.0" "[-1, 1] 0.0"; do
  said=$(python3 -c "from statistics_of import mean; print(float(mean(${case% *})))" 2>/dev/null)
  [ "$said" = "${case##* }" ] && right=$((right + 1))
done
echo "$right of 4"
python3 -I -c "import json, sys; json.dump({'reward': int(sys.argv[1]) / 4}, open('/logs/verifier/reward.json', 'w'))" $right
