from collections import Counter

from PIL import Image, ImageOps

image = Image.radial_gradient("L")
coloured = ImageOps.colorize(image, "darkred", "gold").resize((64, 64))
reduced = coloured.quantize(8)
(index, count), *_ = Counter(reduced.tobytes()).most_common(1)
print("most frequent colour", reduced.getpalette()[index * 3 : index * 3 + 3], f"{count / 64**2:.0%}")
