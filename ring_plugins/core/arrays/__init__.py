"""Element types, memory, arithmetic, and how numbers are encoded between hosts."""
