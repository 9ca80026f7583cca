import requests
from bs4 import BeautifulSoup

PAGE = """<table><tr><th>item</th><th>price</th></tr>
<tr><td><a href="/tea">Tea</a></td><td>2.50 €</td></tr><tr><td><a href="/jam">Jam</a></td><td>4.20 €</td></tr></table>"""


def prices(page: str) -> dict[str, float]:
    rows = BeautifulSoup(page, "lxml").find_all("tr")[1:]
    return {row.a.text: float(row.find_all("td")[1].text.split()[0]) for row in rows}


request = requests.Request("GET", "https://shop.example/list", params={"page": 2}).prepare()
print("would fetch", request.url)
print(prices(PAGE))
