import numpy as np
import pandas as pd
import statsmodels.formula.api as smf

rng = np.random.default_rng(9)
data = pd.DataFrame({"hours": rng.uniform(0, 10, 120), "sleep": rng.uniform(4, 9, 120)})
data["grade"] = 40 + 4 * data["hours"] + 2 * data["sleep"] + rng.normal(0, 4, 120)
result = smf.ols("grade ~ hours + sleep", data).fit()
print(result.params.round(2).to_dict(), "R²", round(result.rsquared, 3))
