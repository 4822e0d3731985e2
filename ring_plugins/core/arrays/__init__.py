"""Element types, memory, arithmetic, and how numbers are coded between hosts."""
