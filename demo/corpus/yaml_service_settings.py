import yaml
from pydantic import BaseModel, Field, ValidationError


class Service(BaseModel):
    name: str
    port: int = Field(gt=0, lt=65536)
    tags: list[str] = []


text = "- {name: api, port: 8080, tags: [public]}\n- {name: jobs, port: 99999}\n"
for entry in yaml.safe_load(text):
    try:
        print(Service(**entry))
    except ValidationError as error:
        print(entry["name"], "is not valid:", error.errors()[0]["msg"])
