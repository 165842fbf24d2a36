"""How a bucket is stepped. Each engine has four verbs: prepare, measure, write, release."""
