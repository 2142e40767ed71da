"""Names, places and things that the generators write about. Pure data."""


def words(text: str) -> list[str]:
    """The words of a text; data reads better so than as a list of quoted strings."""
    return text.split()


NAMES = words(
    "Mia Tom Ann Ben Eva Leo Ivy Max Zoe Sam Ada Kai Lina Omar Nora Paul Rosa Hugo Amir Jade Finn Elsa Marco "
    "Priya Yuki Chen Aisha Diego Freya Ravi Sofia Luca Anna Peter Maria David Laura Emma Noah Olivia Liam Lucas "
    "Mila Aria Ethan Grace Henry Jack James Julia Kate Lily Lucy Mark Nina Oscar Rita Ruth Sara Simon Tara Theo "
    "Vera Will Alice Bruno Carla Dora Emil Fatima Greta Hana Ines Jonas Karim Lars Maya Nadia Olga Pablo Quinn "
    "Rana Sven Tina Uma Viktor Wendy Xavier Yara Zain Bob Carol Clara Daniel Erik Felix George Helen Ian Jane"
)

SURNAMES = words(
    "Smith Jones Garcia Meyer Rossi Novak Silva Kim Tanaka Khan Brown Berg Costa Dubois Fischer Green Hall Ito "
    "Jansen Klein Lopez Moreau Nguyen Olsen Patel Reid Santos Turner Weber Young Adams Baker Clark Evans"
)

CITIES = words(
    "Oslo Paris Rome Berlin Madrid Lisbon London Vienna Prague Dublin Athens Warsaw Cairo Tokyo Delhi Lima Quito "
    "Boston Denver Austin Seattle Chicago Toronto Sydney Seoul Beijing Nairobi Lagos Accra Helsinki Zurich Geneva "
    "Milan Naples Porto Seville Lyon Bergen Malmo Tampere Riga Tallinn Vilnius Krakow Budapest Sofia Bogota "
    "Havana Dallas Miami Hamburg Munich Turin Osaka Kyoto Mumbai Hanoi Manila Jakarta Perth"
)

OBJECTS = words(
    "apples pears books pencils marbles stickers shells coins stamps cards cookies oranges stones pens beads toys "
    "lemons plums cups eggs balloons flowers tickets buttons candles nuts bottles photos ribbons badges"
)

CONTAINERS = ("box boxes", "bag bags", "basket baskets", "pack packs", "jar jars", "crate crates")

JOBS = words("teacher nurse baker farmer doctor painter pilot lawyer cook driver writer singer engineer plumber")

SYLLABLES = words(
    "ka lo mi ra ten vor sel du ni bar ga to re shi mon el an dri fa lu pe qua sto vi wen xo yar zu ber hol jin "
    "cra the ol is un em or tal nef gri bo"
)
