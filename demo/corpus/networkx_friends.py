import networkx as nx

club = nx.karate_club_graph()
rank = nx.pagerank(club)
print("most central:", sorted(rank, key=rank.get, reverse=True)[:3])
for number, group in enumerate(nx.community.greedy_modularity_communities(club), 1):
    print(number, sorted(group))
