"""Looking at programs: what was traced, rewritten, cut, compiled and will be captured."""
