"""Legacy entries: what other tools and older versions stored, validated, converted, committed and journalled."""
