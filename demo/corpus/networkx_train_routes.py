import networkx as nx

lines = [("Lille", "Paris", 62), ("Paris", "Lyon", 116), ("Lyon", "Nice", 270), ("Paris", "Bordeaux", 124),
         ("Bordeaux", "Toulouse", 125), ("Toulouse", "Nice", 460), ("Lyon", "Toulouse", 240)]
network = nx.Graph()
network.add_weighted_edges_from(lines, weight="minutes")
print(nx.shortest_path(network, "Lille", "Nice", weight="minutes"))
print(nx.shortest_path_length(network, "Lille", "Nice", weight="minutes"), "minutes")
print("cut points:", sorted(nx.articulation_points(network)))
