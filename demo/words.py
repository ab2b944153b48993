"""English words, first names and places that the generators draw from."""

from __future__ import annotations


def _listed(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.split()))


WORDS: tuple[str, ...] = _listed(
    """
ant bear bee bird bison camel cat chicken cow crab crow deer dog dolphin donkey duck eagle
elephant falcon ferret fish fox frog gazelle giraffe goat goose hamster hare hawk hedgehog heron
horse jaguar kitten koala lamb leopard lion lizard llama lobster monkey moose mouse octopus otter
owl ox panda parrot penguin pig pigeon pony puppy rabbit raccoon rat raven robin salmon seal shark
sheep snail snake spider squirrel swan tiger toad turkey turtle walrus whale wolf zebra
apple apricot banana berry bread butter cabbage cake carrot celery cheese cherry chili chocolate
cocoa coconut cookie corn cream cucumber date egg fig flour garlic ginger grape honey jam juice
kale kiwi leek lemon lentil lettuce lime mango melon milk mint mushroom mustard noodle nut oat
olive onion orange papaya pasta peach peanut pear pepper pickle pie plum potato pumpkin radish
raisin rice salad salt sauce soup spinach squash sugar syrup tea toast tomato turnip vanilla walnut
water wheat yogurt
amber azure beige black blue bronze brown coral crimson gold gray green indigo ivory lilac maroon
navy pink purple red ruby scarlet silver teal violet white yellow
airplane anchor arrow bag ball balloon band barrel basket bath battery bed bell belt bench bicycle
blanket boat book boot bottle bowl box bracelet brick bridge broom brush bucket bus button cabin
cable camera candle canvas car card carpet cart castle chain chair chalk chest clock coat coin comb
compass computer cord couch crane crown cup curtain desk dice dish door dress drum engine envelope
fan fence ferry flag flute fork frame garage gate glass globe glove guitar hammer harbor hat helmet
hook hotel house jacket jar kettle key keyboard kite knife ladder lamp lantern laptop letter lock
magnet map marble mask match medal mirror motor nail napkin necklace needle net notebook oven
paddle page paint palace pan paper pen pencil piano picture pillow pipe plate pocket pump puzzle
radio raft rail ribbon ring road robot rocket roof rope rug ruler saddle sandal saw scarf school
scissors screen shelf shell ship shirt shoe shovel sink skirt soap sock sofa spoon stairs stamp
statue stove string suit sweater sword table tank tape telescope tent ticket tire torch towel tower
toy tractor train tray truck trumpet tunnel umbrella vase violin wagon wallet watch wheel whistle
window wire zipper
autumn beach bush canyon cave cliff cloud coast comet creek dawn desert dune dust earth field fire
flame flower fog forest frost galaxy garden glacier grass hail hill ice island jungle lake leaf
lightning meadow mist moon moss mountain mud ocean orbit path peak pebble planet pond rain rainbow
river rock root sand sea seed shadow shore sky smoke snow spring star steam stone storm stream
summer sun sunset thunder tide tree valley volcano wave weather wind winter wood
actor artist author baker barber builder butcher captain chef clerk coach dancer dentist doctor
driver editor farmer fisher gardener guard hunter judge king knight lawyer mayor miner nurse painter
pilot pirate player plumber poet porter prince queen ranger sailor singer soldier student tailor
teacher tutor waiter weaver wizard writer
answer basic bright brave busy calm careful cheap clean clever cold cool crisp daily deep dry early
easy empty fair famous fast fine flat fresh friendly gentle glad grand great happy hard heavy high
honest hot huge kind large late lazy light little long loud lucky mild modern narrow neat new nice
noble odd old open plain polite proud quick quiet rapid rare ready rich round rough safe sharp
shiny short silent simple slow small smart smooth soft solid sour steady steep strong sweet swift
tall tame thick thin tidy tiny tough vast warm weak wet wide wild wise young
add ask bake begin blow borrow bring build buy call carry catch climb close collect cook count
create cut dance deliver dig draw drink drive drop eat enter fall fetch find finish float fly fold
follow forget gather give grow guess hear help hide hold hunt jump keep kick laugh learn leave lift
listen make march measure meet melt mix move notice offer order pack pass pick plant play pour pull
push reach read repair rest return ride rise run sail save search sell send share shout sing sit
skate sleep slide smile speak spell spend spin stand start stop study swim take talk teach tell
think throw tie touch trade travel try turn visit wait walk wash wear whisper win work wrap write
age air art baby bank bit body bone brain branch bubble center chance circle city class club color
corner crowd culture day dream edge energy event eye face family feast figure finger foot force
friend game gift group habit hand heart hero history hobby hour idea ink inch job joke journey
joy language law lesson level line list logic luck lunch magic market meal memory metal minute model
month morning motion mouth music name nation nature night noise nose note number office page pair
park part party past peace people piece place plan plot poem point power price prize problem
program promise proof pulse question race record region report river room row rule scale science
score second secret shape side sign silence skill song sound space speed sport square stage state
station step story street style sum supper surprise symbol system task team test theory thing
thought time title today tone tooth town track tradition trick trip trust truth uncle unit value
victory view village voice vote week weight winner wish wonder word world year zero
"""
)

FIRST_NAMES: tuple[str, ...] = _listed(
    """
Ada Adam Alan Alex Alice Amir Amy Ana Anna Anton Arthur Ben Bob Carl Carla Chen Clara Dan Daniel
David Diana Elena Eli Ella Emil Emma Erik Eva Felix Fiona Frank George Grace Hana Hannah Helen
Henry Hugo Ian Ida Ines Iris Ivan Jack Jane Jonas Julia Karl Kate Kim Lara Laura Lee Leo Lena Liam
Lina Lisa Lucas Lucy Maria Mark Martin Mary Max Maya Mia Mila Mona Nadia Nina Nora Noah Olga Oliver
Omar Oscar Otto Paul Paula Peter Petra Priya Rafael Ravi Rita Robert Rosa Ruth Sam Sara Simon Sofia
Sonja Stella Tara Theo Thomas Tim Tina Tom Uma Vera Victor Wendy Yara Yuki Zoe
"""
)

PLACES: tuple[str, ...] = _listed(
    """
Athens Berlin Bern Boston Brazil Cairo Canada Chicago Chile China Cuba Dallas Delhi Denmark Dublin
Egypt Fiji Finland France Geneva Germany Ghana Greece Hamburg Hanoi India Ireland Italy Japan Kenya
Lima Lisbon London Lyon Madrid Malta Mexico Miami Milan Monaco Moscow Munich Nepal Norway Osaka Oslo
Oxford Paris Peru Poland Porto Prague Qatar Quito Riga Rome Seattle Seoul Spain Sweden Sydney Tokyo
Toronto Turin Utrecht Venice Vienna Vietnam Warsaw Zagreb Zurich
"""
)

COLOURS: tuple[str, ...] = _listed(
    "black blue brown gold gray green orange pink purple red silver teal violet white yellow"
)

ANIMALS: tuple[str, ...] = _listed(
    """
bear camel cat cow dog donkey duck eagle fox frog goat hamster horse lion lizard monkey mouse otter
owl panda parrot penguin pig pony rabbit seal sheep snake spider swan tiger turtle wolf zebra
"""
)

JOBS: tuple[str, ...] = _listed(
    """
actor baker barber builder captain chef clerk coach dancer dentist doctor driver editor farmer
gardener judge lawyer miner nurse painter pilot plumber poet sailor singer tailor teacher waiter
weaver writer
"""
)

FRUITS: tuple[str, ...] = _listed(
    "apple apricot banana cherry fig grape kiwi lemon lime mango melon orange peach pear plum"
)
