import io

import matplotlib.pyplot as plt
import pandas as pd

data = pd.DataFrame({"month": range(1, 13), "oslo": [-4, -4, 0, 5, 11, 15, 17, 16, 11, 6, 1, -3],
                     "rome": [8, 9, 11, 14, 18, 22, 25, 25, 21, 17, 12, 9]}).set_index("month")
figure, axes = plt.subplots(figsize=(6, 4))
data.plot(ax=axes, marker="o")
axes.set_ylabel("mean temperature (°C)")
picture = io.BytesIO()
figure.savefig(picture, format="png", dpi=80)
print(len(picture.getvalue()), "bytes of PNG; warmest:", data.max().to_dict())
