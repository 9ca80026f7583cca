import numpy as np
from PIL import Image

gradient = np.tile(np.linspace(90, 160, 256, dtype=np.uint8), (64, 1))
image = Image.fromarray(gradient)
values = np.asarray(image, dtype=float)
stretched = ((values - values.min()) / (values.max() - values.min()) * 255).astype(np.uint8)
print(image.getextrema(), "→", Image.fromarray(stretched).getextrema())
