"""What is remembered: state kinds, layouts, keys, records, the index, the planner and the prefix store.

This room knows tokens, arrays and files. It knows nothing of requests, sampling or HTTP.
"""
