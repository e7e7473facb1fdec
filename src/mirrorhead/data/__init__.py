"""Where problems come from: random ones, the paper's examples, real data sets."""
