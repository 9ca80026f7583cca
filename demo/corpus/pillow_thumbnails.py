import io

from PIL import Image, ImageDraw, ImageFilter

picture = Image.new("RGB", (640, 480), "navy")
draw = ImageDraw.Draw(picture)
for step in range(0, 240, 20):
    draw.ellipse((80 + step, step, 560 - step, 480 - step), outline="white", width=3)
for size in (256, 128, 64):
    small = picture.filter(ImageFilter.GaussianBlur(1))
    small.thumbnail((size, size))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=85)
    print(small.size, file.tell(), "bytes")
