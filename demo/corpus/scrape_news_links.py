from urllib.parse import urljoin

import requests
from bs4 import BeautifulSoup

session = requests.Session()
session.headers["User-Agent"] = "example/1.0"
prepared = session.prepare_request(requests.Request("GET", "https://news.example/today"))
html = "<ul class=links><li><a href='/a'>First</a><li><a href='b?x=1'>Second</a><li><a>Nothing</a></ul>"
soup = BeautifulSoup(html, "html.parser")
for link in soup.select("ul.links a[href]"):
    print(link.get_text(), urljoin(prepared.url, link["href"]))
