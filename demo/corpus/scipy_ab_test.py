import numpy as np
from scipy import stats

rng = np.random.default_rng(11)
control = rng.normal(10.0, 2.0, 400)
variant = rng.normal(10.4, 2.1, 380)
test = stats.ttest_ind(control, variant, equal_var=False)
print(f"difference {variant.mean() - control.mean():.2f}, t = {test.statistic:.2f}, p = {test.pvalue:.4f}")
print("normal enough:", stats.shapiro(control).pvalue > 0.01)
