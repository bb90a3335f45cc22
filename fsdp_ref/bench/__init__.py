"""Side-by-side benchmarks: contenders take turns inside one run, so that what slows one slows all. Ratios, never bare times."""
