"""What measures: traces and replay, costs, contests between policies, the clock, tuning and reports."""
